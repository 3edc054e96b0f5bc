"""What a stack would do before it is started: pool ratios from a simulated load."""
