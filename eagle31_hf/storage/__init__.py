"""Files that this library writes and reads, whatever they hold: tensors, JSON lines, folders that appear whole."""
