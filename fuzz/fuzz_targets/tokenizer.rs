//! Any `tokenizer.json` is refused, or turns text into ids of its vocabulary and back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_exec::data::{Tokenizer, is_guarded};

fuzz_target!(
    init: {
        // The library's own panics become errors; all others end the fuzzer.
        let fatal = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !is_guarded() {
                fatal(panic);
            }
        }));
    },
    |bytes: &[u8]| {
        let file = paceline_fuzz::file("tokenizer", bytes);
        if let Ok(tokenizer) = Tokenizer::open(&file)
            && let Ok(ids) = tokenizer.encode("größer, a few words\n 0x1F600 😀")
        {
            assert!(ids.iter().all(|id| *id < tokenizer.vocab()));
            let _ = tokenizer.decode(&ids);
        }
    }
);
