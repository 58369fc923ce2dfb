"""Data: sources of documents, tokenizers, packing and the input pipeline.

A source gives documents with random access; a tokenizer makes ids of them; ``TextInput`` splits off
held-out documents, shuffles, packs and deals to rows, and its position is saved and restored
exactly on any number of processes.

Built on grain where it earns its place: the state protocol of iterators and thread prefetching
(``_iterator.py``, which says what of grain is not used and why), and every source is a grain
``RandomAccessDataSource``. grain is imported when the first iterator that reads ahead is made,
because its import takes longer than everything else here; likewise pyarrow when a Parquet file is
opened.
"""

from axcore.data._heldout import HeldoutBatches
from axcore.data._input import BaseInput, TextInput
from axcore.data._iterator import BatchIterator, merge_states
from axcore.data._json_lines import JsonLines
from axcore.data._mixture import Mixture
from axcore.data._packing import Batch, empty_batch
from axcore.data._parquet import Parquet
from axcore.data._python_reference import PythonReference
from axcore.data._reference import bits_per_byte, reference_bits_per_byte
from axcore.data._source import BaseSource, Document, Skipped
from axcore.data._text_files import TextFiles
from axcore.data._tokenizers import BaseTokenizer, ByteTokenizer, load_tokenizer

__all__ = [
    "BaseInput",
    "BaseSource",
    "BaseTokenizer",
    "Batch",
    "BatchIterator",
    "ByteTokenizer",
    "Document",
    "HeldoutBatches",
    "JsonLines",
    "Mixture",
    "Parquet",
    "PythonReference",
    "Skipped",
    "TextFiles",
    "TextInput",
    "bits_per_byte",
    "empty_batch",
    "load_tokenizer",
    "merge_states",
    "reference_bits_per_byte",
]
