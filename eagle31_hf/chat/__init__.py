"""Chats with a target and its drafter, in a terminal and in a browser."""
