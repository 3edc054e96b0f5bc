"""The dashboard; it shows what the admin API says and does no work of its own."""
