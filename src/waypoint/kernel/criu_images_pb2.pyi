from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class inventory_entry(_message.Message):
    __slots__ = ("img_version", "root_ids")
    IMG_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOT_IDS_FIELD_NUMBER: _ClassVar[int]
    img_version: int
    root_ids: task_kobj_ids_entry
    def __init__(self, img_version: _Optional[int] = ..., root_ids: _Optional[_Union[task_kobj_ids_entry, _Mapping]] = ...) -> None: ...

class task_kobj_ids_entry(_message.Message):
    __slots__ = ("net_ns_id",)
    NET_NS_ID_FIELD_NUMBER: _ClassVar[int]
    net_ns_id: int
    def __init__(self, net_ns_id: _Optional[int] = ...) -> None: ...

class tty_info_entry(_message.Message):
    __slots__ = ("id", "sid", "pgrp")
    ID_FIELD_NUMBER: _ClassVar[int]
    SID_FIELD_NUMBER: _ClassVar[int]
    PGRP_FIELD_NUMBER: _ClassVar[int]
    id: int
    sid: int
    pgrp: int
    def __init__(self, id: _Optional[int] = ..., sid: _Optional[int] = ..., pgrp: _Optional[int] = ...) -> None: ...

class pstree_entry(_message.Message):
    __slots__ = ("pid", "pgid")
    PID_FIELD_NUMBER: _ClassVar[int]
    PGID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    pgid: int
    def __init__(self, pid: _Optional[int] = ..., pgid: _Optional[int] = ...) -> None: ...

class pagemap_head(_message.Message):
    __slots__ = ("pages_id",)
    PAGES_ID_FIELD_NUMBER: _ClassVar[int]
    pages_id: int
    def __init__(self, pages_id: _Optional[int] = ...) -> None: ...

class pagemap_entry(_message.Message):
    __slots__ = ("vaddr", "compat_nr_pages", "in_parent", "flags", "nr_pages")
    VADDR_FIELD_NUMBER: _ClassVar[int]
    COMPAT_NR_PAGES_FIELD_NUMBER: _ClassVar[int]
    IN_PARENT_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    NR_PAGES_FIELD_NUMBER: _ClassVar[int]
    vaddr: int
    compat_nr_pages: int
    in_parent: bool
    flags: int
    nr_pages: int
    def __init__(self, vaddr: _Optional[int] = ..., compat_nr_pages: _Optional[int] = ..., in_parent: bool = ..., flags: _Optional[int] = ..., nr_pages: _Optional[int] = ...) -> None: ...
