"""Load, latency percentiles and goodput, measured against a running stack."""
