/* Loaded into CRIU (LD_PRELOAD), so that it takes less time; what it does to a tree is the same.
 *
 * CRIU forks half a dozen helpers for each dump and restore. A helper that ends runs the end routines of every library that CRIU is
 * linked with, which costs more than what it was forked for: here they just end. So does CRIU itself when all went well.
 *
 * The library stands in for libbsd, too, of which CRIU wants its title in the process list; gnutls.c and nftables.c stand in for
 * two others. They bring twenty libraries along that each fork would have to copy and each start to link.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef int entry(int, char **, char **);
typedef int start(entry *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);

static entry *program;
static pid_t first;

/* CRIU starts other programs, tar for one, which are not to end like that */
__attribute__((constructor)) static void alone(void)
{
	first = getpid();
	unsetenv("LD_PRELOAD");
	unsetenv("LD_BIND_NOW");
}

void exit(int status)
{
	if (getpid() == first) {
		void (*next)(int) = (void (*)(int))dlsym(RTLD_NEXT, "exit");

		if (status)
			next(status); /* it says why on the way out */
		fflush(NULL);
	}
	_exit(status);
}

static int ended(int count, char **words, char **environment)
{
	exit(program(count, words, environment));
}

int __libc_start_main(entry *main, int count, char **words, void (*begin)(void), void (*end)(void), void (*linker)(void), void *stack)
{
	start *next = (start *)dlsym(RTLD_NEXT, "__libc_start_main");

	program = main;
	return next(ended, count, words, begin, end, linker, stack);
}

void setproctitle_init(int count, char **words, char **environment)
{
	(void)count, (void)words, (void)environment;
}

void setproctitle(const char *format, ...)
{
	(void)format;
}
