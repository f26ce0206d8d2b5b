/*
 * The session's root: an overlay of idmapped clones of its layers, mounted at STAGE. Included by launch.c, whose options it reads.
 */
#ifndef OVERLAY_H
#define OVERLAY_H

static int fs_open(const char *type) { return syscall(SYS_fsopen, type, FSOPEN_CLOEXEC); }

static void fs_set(int fs, const char *key, const char *value)
{
	if (syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, value, 0))
		die("overlay option %s=%s", key, value);
}

static void fs_flag(int fs, const char *key)
{
	if (syscall(SYS_fsconfig, fs, FSCONFIG_SET_FLAG, key, NULL, 0))
		die("overlay option %s", key);
}

/* A detached mount; -1 with EBUSY when a layer is still the upper of another overlay. */
static int fs_mount(int fs, const char *what)
{
	char log[512];
	int mount_fd, saved;
	ssize_t n;

	if (!syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) &&
	    (mount_fd = syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, 0)) >= 0)
		return mount_fd;
	if (errno == EBUSY)
		return -1;
	saved = errno;
	while ((n = read(fs, log, sizeof(log) - 1)) > 0) {
		log[n] = 0;
		fprintf(stderr, "%s: %s\n", what, log);
	}
	errno = saved;
	die("mounting %s", what);
	return -1;
}

/*
 * A user namespace that says how ids on disk appear: disk id N as kuid idmap+N, the same shift as the session's own map, so that
 * root inside owns its files but nothing of the host's. The second line gives the mounter, kuid 0, an id to write as: overlayfs
 * needs one for its work directory.
 */
static int idmap_namespace(void)
{
	char path[64], map[96];
	int wait[2], fd;
	pid_t pid;

	if (pipe2(wait, O_CLOEXEC))
		die("pipe");
	pid = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
	if (pid < 0)
		die("clone a user namespace");
	if (pid == 0) {
		char byte;
		close(wait[1]);
		_exit(read(wait[0], &byte, 1) < 0);
	}
	snprintf(map, sizeof(map), "0 %u %u\n%u 0 65536\n", idmap, ID_RANGE, idmap);
	for (int g = 0; g < 2; g++) {
		snprintf(path, sizeof(path), "/proc/%d/%cid_map", pid, g ? 'g' : 'u');
		if (write_file(path, map))
			die("writing %s", path);
	}
	snprintf(path, sizeof(path), "/proc/%d/ns/user", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		die("opening %s", path);
	close(wait[0]);
	close(wait[1]);
	waitpid(pid, NULL, 0);
	return fd;
}

static int ready_namespace = -1;
static unsigned ready_idmap;	/* what it says, if somebody has made it ahead */

/* A private clone of the mount that `path` lies on, rooted there and idmapped when asked; overlayfs takes it as a layer. */
static int layer_root(const char *path, int namespace)
{
	struct mount_attr attr = { .attr_set = MOUNT_ATTR_IDMAP, .userns_fd = namespace };
	int fd = syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);

	if (fd < 0)
		die("open_tree %s", path);
	if (namespace >= 0 && syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &attr, sizeof(attr))) {
		int saved = errno;
		fprintf(stderr, "idmap refused on %s\n", path);
		errno = saved;
		die("mount_setattr");
	}
	return fd;
}

static int overlay_options(int layers, const int *bases)
{
	int fs = fs_open("overlay");
	char path[4096];

	if (fs < 0)
		die("fsopen overlay");
	for (int i = 0; i < n_lower; i++) {
		snprintf(path, sizeof(path), "/proc/self/fd/%d/%s", layers, lower[i]);
		fs_set(fs, "lowerdir+", path);
	}
	for (int i = 0; i < n_base; i++) {
		snprintf(path, sizeof(path), "/proc/self/fd/%d", bases[i]);
		fs_set(fs, "lowerdir+", path);
	}
	snprintf(path, sizeof(path), "/proc/self/fd/%d/%s", layers, upper);
	fs_set(fs, "upperdir", path);
	snprintf(path, sizeof(path), "/proc/self/fd/%d/%s", layers, work);
	fs_set(fs, "workdir", path);
	fs_set(fs, "redirect_dir", "on");
	fs_set(fs, "index", "on");	/* with nfs_export: inotify watches can be restored */
	fs_set(fs, "nfs_export", "on");
	fs_set(fs, "xino", "auto");
	fs_flag(fs, "volatile");	/* an upper is never mounted twice; sealing it syncs it */
	return fs;
}

/*
 * The top layer of a session that was just ended is its former upper. Anyone who looked into that session (a copy, a view) may hold
 * its overlay for an instant longer, and until then the kernel says EBUSY.
 */
static int make_overlay(void)
{
	int namespace = !idmap ? -1 : ready_namespace >= 0 && ready_idmap == idmap ? ready_namespace : idmap_namespace();
	int layers = layer_root(layers_dir, namespace);
	int bases[MAX_BASE], mount_fd = -1, fs;
	struct timespec pause = { 0, 5000000 };
	struct statvfs mounted;

	for (int i = 0; i < n_base; i++)
		bases[i] = layer_root(base[i], namespace);
	for (int try = 0; mount_fd < 0 && try < 400; try++) {
		if (try)
			nanosleep(&pause, NULL);
		fs = overlay_options(layers, bases);
		mount_fd = fs_mount(fs, "the session's overlay");
		close(fs);
	}
	if (mount_fd < 0)
		die("mounting the session's overlay");
	/* for want of space for its own directories the kernel mounts it all the same, read-only: a session that cannot write */
	if (fstatvfs(mount_fd, &mounted) || mounted.f_flag & ST_RDONLY) {
		errno = fstatvfs(layers, &mounted) || mounted.f_flag & ST_RDONLY ? EROFS : ENOSPC;
		die("mounting the session's overlay to be written to");
	}
	return mount_fd;
}

static void attach_overlay(int mount_fd)
{
	if (syscall(SYS_move_mount, mount_fd, "", AT_FDCWD, STAGE, MOVE_MOUNT_F_EMPTY_PATH))
		die("attaching the overlay");
	close(mount_fd);
}
#endif
