//! Any bytes as a safetensors file: an error, or tensors that all lie inside the file.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use minfer_format::bytes::AlignedBuf;
use minfer_format::hf::Safetensors;

fuzz_target!(|data: &[u8]| {
    match Safetensors::from_bytes(Path::new("fuzz"), AlignedBuf::from(data).into()) {
        Ok(file) => {
            for t in file.tensors() {
                assert_eq!(file.raw(&t.name).expect("a listed tensor has data").len(), t.n_bytes());
                assert_eq!(file.weight(&t.name).is_ok(), t.ty().is_some());
            }
        }
        Err(error) => assert!(error.to_string().len() < 1000),
    }
});
