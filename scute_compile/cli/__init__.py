"""The command line. A command reads its arguments, calls for a report, and renders it."""
