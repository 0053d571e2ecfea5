"""The front ends: one PEFT method per file, from configuration and keys to sites and slots."""
