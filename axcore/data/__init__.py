"""Data: sources of documents, tokenizers, packing and the input pipeline.

A source gives documents with random access; a tokenizer makes ids of them; ``TextInput`` splits off
held-out documents, shuffles, packs and deals to rows, and its position is saved and restored
exactly on any number of processes. ``TransformedTextInput`` makes another task of the same rows:
``MaskedTokens``, ``SpanCorruption``, or a transform of your own. ``ImageInput`` does the like for
labelled images.

grain is used where it earns its place: every source is a grain ``RandomAccessDataSource``, every
grain ``MapDataset`` is a source (``GrainDataset``), and positions follow grain's iterator protocol.
``_order.py``, ``_iterator.py`` and ``_prefetch.py`` say what of grain is not used, and what was
measured. grain and pyarrow are imported by the sources that need them, when they are prepared.
"""

from axcore.data._gguf_tokenizer import GGUFTokenizer
from axcore.data._grain_dataset import GrainDataset
from axcore.data._heldout import EvalBatches, HeldoutBatches
from axcore.data._hf_tokenizer import HFTokenizer
from axcore.data._image_input import HeldoutImages, ImageInput
from axcore.data._images import BaseImageSource, DrawnNumbers, NpzImages
from axcore.data._input import BaseInput, DocumentInput, TextInput, TransformedTextInput
from axcore.data._iterator import BatchIterator, merge_states
from axcore.data._json_lines import JsonLines
from axcore.data._masking import MaskedTokens
from axcore.data._mixture import Mixture
from axcore.data._order import indexed_hashes
from axcore.data._packing import Batch, empty_batch
from axcore.data._parquet import Parquet
from axcore.data._python_reference import PythonReference
from axcore.data._reference import bits_per_byte, reference_bits_per_byte
from axcore.data._sentencepiece import SentencePieceTokenizer
from axcore.data._source import BaseSource, Document, Skipped
from axcore.data._span_corruption import SpanCorruption
from axcore.data._strided import StridedBatches
from axcore.data._text_files import TextFiles
from axcore.data._tiktoken import TiktokenTokenizer
from axcore.data._tokenizer_files import FileTokenizer
from axcore.data._tokenizer_search import find_tokenizer
from axcore.data._tokenizer_training import train_tokenizer
from axcore.data._tokenizers import BaseTokenizer, ByteTokenizer, load_tokenizer
from axcore.data._transform import BaseTransform, BoundTransform

__all__ = [
    "BaseImageSource",
    "BaseInput",
    "BaseSource",
    "BaseTokenizer",
    "BaseTransform",
    "Batch",
    "BatchIterator",
    "BoundTransform",
    "ByteTokenizer",
    "Document",
    "DocumentInput",
    "DrawnNumbers",
    "EvalBatches",
    "FileTokenizer",
    "GGUFTokenizer",
    "GrainDataset",
    "HFTokenizer",
    "HeldoutBatches",
    "HeldoutImages",
    "ImageInput",
    "JsonLines",
    "MaskedTokens",
    "Mixture",
    "NpzImages",
    "Parquet",
    "PythonReference",
    "SentencePieceTokenizer",
    "Skipped",
    "SpanCorruption",
    "StridedBatches",
    "TextFiles",
    "TextInput",
    "TiktokenTokenizer",
    "TransformedTextInput",
    "bits_per_byte",
    "empty_batch",
    "find_tokenizer",
    "indexed_hashes",
    "load_tokenizer",
    "merge_states",
    "reference_bits_per_byte",
    "train_tokenizer",
]
