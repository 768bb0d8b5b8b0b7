"""What both sides of the process seam speak: errors, messages, manifest and value types."""
