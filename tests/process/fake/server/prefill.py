"""A fake worker."""

from server._fake import main

main()
