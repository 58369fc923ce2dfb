"""Data: sources of documents, tokenizers, packing and the input pipeline.

A source gives documents with random access; a tokenizer makes ids of them; ``TextInput`` splits off
held-out documents, shuffles, packs and deals to rows, and its position is saved and restored
exactly on any number of processes.

grain is used where it earns its place: every source is a grain ``RandomAccessDataSource``, every
grain ``MapDataset`` is a source (``GrainDataset``), and positions follow grain's iterator protocol.
``_order.py``, ``_iterator.py`` and ``_prefetch.py`` say what of grain is not used, and what was
measured. grain and pyarrow are imported by the sources that need them, when they are prepared.
"""

from axcore.data._gguf_tokenizer import GGUFTokenizer
from axcore.data._grain_dataset import GrainDataset
from axcore.data._heldout import HeldoutBatches
from axcore.data._hf_tokenizer import HFTokenizer
from axcore.data._input import BaseInput, TextInput
from axcore.data._iterator import BatchIterator, merge_states
from axcore.data._json_lines import JsonLines
from axcore.data._mixture import Mixture
from axcore.data._packing import Batch, empty_batch
from axcore.data._parquet import Parquet
from axcore.data._python_reference import PythonReference
from axcore.data._reference import bits_per_byte, reference_bits_per_byte
from axcore.data._sentencepiece import SentencePieceTokenizer
from axcore.data._source import BaseSource, Document, Skipped
from axcore.data._text_files import TextFiles
from axcore.data._tiktoken import TiktokenTokenizer
from axcore.data._tokenizer_files import FileTokenizer
from axcore.data._tokenizer_search import find_tokenizer
from axcore.data._tokenizer_training import train_tokenizer
from axcore.data._tokenizers import BaseTokenizer, ByteTokenizer, load_tokenizer

__all__ = [
    "BaseInput",
    "BaseSource",
    "BaseTokenizer",
    "Batch",
    "BatchIterator",
    "ByteTokenizer",
    "Document",
    "FileTokenizer",
    "GGUFTokenizer",
    "GrainDataset",
    "HFTokenizer",
    "HeldoutBatches",
    "JsonLines",
    "Mixture",
    "Parquet",
    "PythonReference",
    "SentencePieceTokenizer",
    "Skipped",
    "TextFiles",
    "TextInput",
    "TiktokenTokenizer",
    "bits_per_byte",
    "empty_batch",
    "find_tokenizer",
    "load_tokenizer",
    "merge_states",
    "reference_bits_per_byte",
    "train_tokenizer",
]
