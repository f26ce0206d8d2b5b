/* From the kernel's first call to a root file system with the usual mounts: what an initramfs and an init do. */
#ifndef BOOT_H
#define BOOT_H
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/route.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void say(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputs("\n", stderr);
}

/* The console's log tells the host why; a machine without its agent is of no use to anybody. */
static void give_up(const char *what)
{
	say("statefork: %s: %s", what, strerror(errno));
	sync();
	reboot(RB_AUTOBOOT);
	_exit(1);
}

static char command_line[4096];

/* The value of `name=value` on the kernel's command line, or NULL. */
static char *parameter(const char *name, char *value, size_t size)
{
	size_t length = strlen(name);

	for (char *at = command_line; (at = strstr(at, name)); at += length) {
		if ((at != command_line && at[-1] != ' ') || at[length] != '=')
			continue;
		snprintf(value, size, "%.*s", (int)strcspn(at + length + 1, " \n"), at + length + 1);
		return value;
	}
	return NULL;
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);

	if (fd >= 0) {
		if (write(fd, text, strlen(text)) < 0)
			say("statefork: %s: %s", path, strerror(errno));
		close(fd);
	}
}

static void attach(const char *what, const char *where, const char *type, unsigned long flags, const char *data)
{
	mkdir(where, 0755);
	if (mount(what, where, type, flags, data) && errno != EBUSY)
		say("statefork: mount %s: %s", where, strerror(errno));
}

static void load_modules(void)
{
	char line[256], path[300];
	FILE *list = fopen("/modules", "re");

	while (list && fgets(line, sizeof(line), list)) {
		line[strcspn(line, "\n")] = 0;
		snprintf(path, sizeof(path), "/m/%s", line);
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST))
			say("statefork: module %s: %s", line, strerror(errno));
		close(fd);
		unlink(path);
	}
	if (list)
		fclose(list);
}

static void wait_for(const char *path)
{
	for (int turn = 0; access(path, F_OK); turn++) {
		if (turn == 1000)
			give_up(path);
		poll(NULL, 0, 10);
	}
}

static void raise_interface(const char *name, const char *address, const char *mask)
{
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct ifreq request = {0};
	struct sockaddr_in *in = (struct sockaddr_in *)&request.ifr_addr;

	snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
	in->sin_family = AF_INET;
	if (address && (inet_pton(AF_INET, address, &in->sin_addr) != 1 || ioctl(fd, SIOCSIFADDR, &request)))
		say("statefork: address %s: %s", address, strerror(errno));
	if (mask && (inet_pton(AF_INET, mask, &in->sin_addr) != 1 || ioctl(fd, SIOCSIFNETMASK, &request)))
		say("statefork: mask %s: %s", mask, strerror(errno));
	if (ioctl(fd, SIOCGIFFLAGS, &request) == 0) {
		request.ifr_flags |= IFF_UP | IFF_RUNNING;
		if (ioctl(fd, SIOCSIFFLAGS, &request))
			say("statefork: %s: %s", name, strerror(errno));
	}
	close(fd);
}

static void set_up_network(void)
{
	char address[32], mask[32], gateway[32], resolver[32], text[64];
	struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
	struct sockaddr_in *in = (struct sockaddr_in *)&route.rt_gateway;
	int fd;

	raise_interface("lo", NULL, NULL);
	if (!parameter("statefork.address", address, sizeof(address)))
		return;
	raise_interface("eth0", address, parameter("statefork.mask", mask, sizeof(mask)));
	if (parameter("statefork.gateway", gateway, sizeof(gateway))) {
		in->sin_family = route.rt_dst.sa_family = route.rt_genmask.sa_family = AF_INET;
		fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
		if (inet_pton(AF_INET, gateway, &in->sin_addr) != 1 || ioctl(fd, SIOCADDRT, &route))
			say("statefork: gateway %s: %s", gateway, strerror(errno));
		close(fd);
	}
	if (parameter("statefork.resolver", resolver, sizeof(resolver))) {
		snprintf(text, sizeof(text), "nameserver %s\n", resolver);
		unlink("/etc/resolv.conf"); /* often a link to where systemd would write */
		write_file("/etc/resolv.conf", text);
	}
}

static void boot(void)
{
	char device[64];
	struct stat status;
	int fd;

	attach("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755");
	fd = open("/dev/console", O_RDWR); /* the kernel could not open it for us: the archive has no /dev */
	for (int number = 0; fd >= 0 && number < 3; number++)
		dup2(fd, number);
	attach("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, command_line, sizeof(command_line) - 1) < 0)
		give_up("/proc/cmdline");
	close(fd);
	load_modules();
	if (!parameter("statefork.root", device, sizeof(device)))
		snprintf(device, sizeof(device), "/dev/vda");
	wait_for(device);
	mkdir("/root", 0755);
	if (mount(device, "/root", "ext4", MS_NOATIME, "noinit_itable"))
		give_up("mounting the root disk");
	mkdir("/root/dev", 0755);
	mkdir("/root/proc", 0555);
	if (mount("/dev", "/root/dev", NULL, MS_MOVE, NULL) || mount("/proc", "/root/proc", NULL, MS_MOVE, NULL))
		give_up("moving /dev and /proc to the root disk");
	unlink("/modules");
	unlink("/init");
	if (chdir("/root") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/"))
		give_up("changing to the root disk");
	attach("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	attach("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	attach("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "gid=5,mode=620,ptmxmode=666");
	attach("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777");
	if (symlink("/proc/self/fd", "/dev/fd") || symlink("/proc/self/fd/0", "/dev/stdin") ||
	    symlink("/proc/self/fd/1", "/dev/stdout") || symlink("/proc/self/fd/2", "/dev/stderr"))
		say("statefork: /dev/fd: %s", strerror(errno));
	mkdir("/etc", 0755);
	mkdir("/tmp", 01777);
	if (stat("/etc/hosts", &status) || !status.st_size)
		write_file("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n");
	if (sethostname("statefork", 9))
		say("statefork: hostname: %s", strerror(errno));
	set_up_network();
}
#endif
