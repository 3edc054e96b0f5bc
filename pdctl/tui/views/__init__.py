"""Pure functions from what is known to lines of text: no widget, no I/O, no theme."""
