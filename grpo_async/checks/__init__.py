"""What is checked before the first step: the configuration against the machine, the preflight, the doctor, estimates of memory."""
