"""Key-value caches whose tokens stay where they are written, and can be taken back."""
