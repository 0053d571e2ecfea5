"""The command line. Each command reads its arguments, requests a report and renders it."""
