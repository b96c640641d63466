"""Knowledge about targets: their layers, embedding and head, masks, and what they can do."""
