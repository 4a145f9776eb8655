"""The scripts that install and check."""
