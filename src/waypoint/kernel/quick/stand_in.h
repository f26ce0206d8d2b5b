/* A library that CRIU is linked with and that Waypoint never makes it use: whatever is called of it ends CRIU, loudly. */
#include <unistd.h>

__attribute__((noreturn)) static void absent(const char *name, size_t length)
{
	static const char tail[] = " was called in a CRIU that is not to use it\n";

	if (write(2, name, length) < 0 || write(2, tail, sizeof(tail) - 1) < 0)
		_exit(126);
	_exit(127);
}

#define ABSENT(name) \
	void name(void) { absent(#name, sizeof(#name) - 1); }
