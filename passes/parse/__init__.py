"""The parse pass and its front ends, one file per PEFT method: from configuration and keys to sites and slots."""
