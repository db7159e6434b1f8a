"""What SGLang servers tell of themselves, read: pages, metrics, lines of logs. Pure."""
