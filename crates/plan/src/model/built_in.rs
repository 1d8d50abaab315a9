//! Built-in models: the files of `models/` in the repository.

use super::Model;
use crate::located::Errors;
use crate::suggest::suggest as nearest_word;

/// Name and TOML text of every built-in model, small ones first within a family.
pub fn all() -> &'static [(&'static str, &'static str)] {
    &FILES
}

/// Built-in model of the given name, or `None` if there is no such name.
///
/// The inner result is an error only if a file of the repository is invalid; a test excludes this.
pub fn get(name: &str) -> Option<Result<Model, Errors>> {
    let (name, text) = all().iter().find(|(known, _)| *known == name)?;
    Some(Model::parse(text, &format!("models/{name}.toml")))
}

/// Built-in name closest to a mistyped one.
pub fn nearest(name: &str) -> Option<&'static str> {
    nearest_word(name, all().iter().map(|(known, _)| *known))
}

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../../models/", $name, ".toml")))),*]
    };
}

static FILES: [(&str, &str); 68] = files![
    "mini",
    "mini-llama",
    "mini-moe",
    "mini-moe-mtp",
    "mlp",
    "gpt2-124m",
    "gpt2-350m",
    "gpt2-774m",
    "gpt2-1.5b",
    "gpt-1.7b",
    "gpt-3.6b",
    "gpt-7.5b",
    "gpt-18b",
    "gpt-39b",
    "gpt-76b",
    "gpt-145b",
    "gpt-310b",
    "gpt-530b",
    "gpt-1008b",
    "gpt3-175b",
    "megatron-8.3b",
    "turing-nlg-17b",
    "turing-530b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "resnet-mini",
    "resnet18",
    "resnet50",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt4-1.8t",
    "deepseek-v3",
    "deepseek-v3-mtp",
    "llama3.1-8b",
    "llama3.1-70b",
    "llama3.1-405b",
    "llama3.2-1b",
    "llama3.2-3b",
    "qwen2.5-7b",
    "qwen2.5-72b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "gemma3-1b",
    "gemma3-4b",
    "gemma3-12b",
    "gemma3-27b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "phi-4",
    "olmo2-7b",
    "olmo2-13b",
    "mistral-7b",
    "deepseek-v2",
    "llama4-scout",
    "llama4-maverick",
    "dlrm-mini",
    "dlrm-criteo",
    "softmax-digits",
    "two-tower",
    "encoder-decoder",
    "vgg16",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_sound_and_named_after_itself() {
        for (name, _) in all() {
            let model = get(name).expect("listed").unwrap_or_else(|errors| panic!("{errors}"));
            assert_eq!(model.name(), *name);
        }
    }

    #[test]
    fn no_name_stands_twice() {
        for (index, (name, _)) in all().iter().enumerate() {
            assert!(all()[..index].iter().all(|(earlier, _)| earlier != name), "{name}");
        }
    }

    #[test]
    fn every_file_says_where_its_numbers_come_from() {
        for (name, text) in all() {
            assert!(text.starts_with("# ") && text.contains("# Source: "), "{name}");
        }
    }

    #[test]
    fn unknown_names_get_the_nearest() {
        assert!(get("gpt2-125m").is_none());
        assert_eq!(nearest("gpt2-125m"), Some("gpt2-124m"));
        assert_eq!(nearest("GPT2_1.5B"), Some("gpt2-1.5b"));
        assert_eq!(nearest("gpt2"), Some("gpt2-124m"));
        assert_eq!(nearest("llama3-7b"), Some("llama3-8b"));
        assert_eq!(nearest("llama-3-70b"), Some("llama3-70b"));
        assert_eq!(nearest("llama3.1-7b"), Some("llama3.1-8b"));
        assert_eq!(nearest("bert-base"), None);
    }
}
