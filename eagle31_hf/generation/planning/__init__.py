"""Planning: how far a round drafts, as the caller asked or as pays by what was measured."""
