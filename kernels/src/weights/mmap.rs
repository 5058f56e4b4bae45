//! Maps a file for reading.

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// Maps the whole of `file`, read-only.
pub(super) fn map_file(file: &File) -> io::Result<Mmap> {
    // SAFETY: the pages belong to the kernel's page cache until `Mmap`'s drop unmaps them; `gguf::Bytes::Mapped` owns
    // the `Mmap`, and `Bytes::as_slice` lends its bytes no longer than it lives. What is left is another process that
    // writes to the file meanwhile, which `Gguf::open` tells its caller to rule out: a shrunk file would fault, and
    // changed bytes are only wrong numbers, because every read of the slice is checked against its length again, and
    // text is copied before it is taken for text (`Gguf::string`).
    unsafe { Mmap::map(file) }
}
