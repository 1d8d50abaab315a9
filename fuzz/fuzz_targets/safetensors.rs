//! Any bytes as a safetensors file are refused, or every tensor named is within them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_exec::safetensors::Reader;

fuzz_target!(|bytes: &[u8]| {
    let file = paceline_fuzz::file("safetensors", bytes);
    if let Ok(reader) = Reader::open(&file) {
        for (name, tensor) in reader.tensors() {
            let elements = tensor.elements();
            assert!(elements <= bytes.len() as u64, "{name}: {elements} elements");
        }
    }
});
