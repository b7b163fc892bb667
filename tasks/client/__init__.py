"""How one request is sent to a server, and how it ends. Shared by every room."""
