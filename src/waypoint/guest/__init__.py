"""What runs inside a session (init.c, PID 1), the frame protocol, and the host side of the shell."""
