"""All that is known of a target: its layers, its embedding and head, what it can do."""
