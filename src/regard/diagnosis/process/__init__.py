"""What runs in the function's own process, and the messages that go there and back."""
