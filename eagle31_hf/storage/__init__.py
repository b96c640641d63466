"""Files that this library writes and reads, whatever they hold: tensors, and folders that appear whole."""
