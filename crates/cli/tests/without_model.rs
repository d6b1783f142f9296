//! A build without the built-in model (`cargo test -p minfer --no-default-features`).
#![cfg(not(feature = "builtin-model"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{minfer, nano_path, refused, said};

#[test]
fn a_model_must_be_named() {
    let error = "Error: no model: this build has none built in (cargo feature 'builtin-model'); name a GGUF file or a \
                 Hugging Face directory";
    for args in [&["run", "hi"][..], &["info"], &["bench", "-o", "json"]] {
        refused(args, 2, error);
    }
    let named = said(minfer(&["run", "-m", nano_path().to_str().unwrap(), "What is 27 + 58?"]));
    assert_eq!((named.code, named.out.as_str()), (Some(0), "27 + 58 = 85.\n"));
}
