"""Reports for people: prompts are decoded, figures kept as they come, and written as a page, a text and JSON."""
