"""Several machines: how their launchers find each other, and the files for Slurm and Kubernetes."""
