"""SWE-ReX's HTTP runtime: `/swerex/ENVIRONMENT` is the host that its `RemoteRuntime` is given."""
