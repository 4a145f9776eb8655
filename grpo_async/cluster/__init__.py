"""Several machines: how their launchers find each other."""
