"""Parts of the microVM backends: `statefork.backends.qemu` and `statefork.backends.firecracker`.

driver.py      the Driver and the Live of both: everything but the VMM
vmm.py         what a VMM has to do, and the values that pass between it and the driver
qemu_*.py      QEMU: its command line, its monitor, its memory and its disks
fc_*.py        Firecracker: its API and its process
agent.py       the host's side of the agent that is PID 1 in every machine; native/ is the agent itself
kernel.py      the guest's kernel and initramfs
roots.py       root disks out of a Dockerfile, a directory or an archive
templates.py   machines that have been booted once, kept in a cache: a start is a revival
"""
