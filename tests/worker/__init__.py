"""Workers without processes: real schedulers, senders and receivers between played peers, on a clock that stands."""
