"""What this machine is and what it gives: the doctor, device queries and measured ceilings."""
