"""One module a command; each has `command`, which `producer.cli` finds by the module's name."""
