"""Several machines: how their launchers find each other, and the batch script for Slurm."""
