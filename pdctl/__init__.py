"""The operator's side of pdctl: profiles, processes, commands, plans and the TUI."""
