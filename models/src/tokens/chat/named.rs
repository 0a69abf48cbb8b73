//! Chat templates that a user names, for folders without one.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use training::internal::write_output;

use super::{ChatTemplate, FILE, read, special_tokens};
use crate::{Error, Result};

/// ChatML. An answer ends with the model's end-of-text token, too, so that generation ends there with tokenizers that have no
/// token for `<|im_end|>`.
const CHATML: &str = "\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{- message.content + '<|im_end|>' -}}
{%- if eos_token and eos_token != '<|im_end|>' -%}{{- eos_token -}}{%- endif -%}
{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
";

/// A chat template to use in place of a folder's.
///
/// ```
/// use models::tokens::NamedTemplate;
///
/// assert_eq!("chatml".parse(), Ok(NamedTemplate::ChatMl));
/// assert_eq!("own.jinja".parse(), Ok(NamedTemplate::File("own.jinja".into())));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamedTemplate {
    /// ChatML: `<|im_start|>role`, a line end, the text, `<|im_end|>`.
    ChatMl,
    /// A file in Jinja.
    File(PathBuf),
}

impl FromStr for NamedTemplate {
    type Err = Infallible;

    fn from_str(text: &str) -> std::result::Result<Self, Infallible> {
        Ok(if text == "chatml" { Self::ChatMl } else { Self::File(text.into()) })
    }
}

impl NamedTemplate {
    fn text(&self) -> Result<String> {
        match self {
            Self::ChatMl => Ok(CHATML.into()),
            Self::File(path) => read(path),
        }
    }

    fn load(&self, folder: Option<&Path>) -> Result<ChatTemplate> {
        let special = folder.map_or(Ok(Default::default()), special_tokens)?;
        let path = match self {
            Self::ChatMl => PathBuf::from("chatml"),
            Self::File(path) => path.clone(),
        };
        ChatTemplate::new(&self.text()?, None, special, path)
    }

    /// Saves the template with a model, where programs look for it.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE);
        write_output(&path, self.text()?.as_bytes()).map_err(Error::io("write", &path))
    }
}

impl ChatTemplate {
    /// Loads the named template, or else that of the folder, if there is one. Special tokens are those of the folder.
    ///
    /// # Errors
    /// Those of [`from_folder`](Self::from_folder).
    pub fn of(named: Option<&NamedTemplate>, folder: Option<&Path>) -> Result<Option<Self>> {
        match named {
            Some(named) => named.load(folder).map(Some),
            None => Ok(folder.map(Self::from_folder).transpose()?.flatten()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Chat;
    use super::*;

    fn chat() -> Chat {
        let messages = r#"[{"role": "system", "content": "Short."}, {"role": "user", "content": "a?"},
            {"role": "assistant", "content": "b"}, {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]"#;
        Chat::from_json(messages).unwrap()
    }

    #[test]
    fn chatml_is_rendered_with_its_answers() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("tokenizer_config.json");
        for (eos, end) in [("</s>", "<|im_end|></s>"), ("<|im_end|>", "<|im_end|>")] {
            std::fs::write(&config, format!(r#"{{"eos_token": "{eos}"}}"#)).unwrap();
            let template =
                ChatTemplate::of(Some(&NamedTemplate::ChatMl), Some(folder.path())).unwrap().unwrap();
            let rendered = template.render(&chat()).unwrap();
            assert_eq!(rendered.len(), 1);
            let expected = format!(
                "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb{end}\n\
                 <|im_start|>user\nc?<|im_end|>\n<|im_start|>assistant\nd{end}\n"
            );
            assert_eq!(rendered[0].text, expected);
            let answers: Vec<_> =
                rendered[0].answers.iter().map(|range| &rendered[0].text[range.clone()]).collect();
            assert_eq!(answers, [format!("b{end}"), format!("d{end}")]);
        }
        assert!(ChatTemplate::of(None, Some(folder.path())).unwrap().is_none());
    }

    #[test]
    fn what_is_saved_is_the_folder_s_template() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("own.jinja");
        std::fs::write(&own, "{% for m in messages %}{{ m.content }}\n{% endfor %}").unwrap();
        NamedTemplate::File(own.clone()).save(folder.path()).unwrap();
        let saved = ChatTemplate::from_folder(folder.path()).unwrap().unwrap().render(&chat()).unwrap();
        assert_eq!(saved[0].text, "Short.\na?\nb\nc?\nd\n");
        let error = NamedTemplate::File(folder.path().join("none.jinja")).save(folder.path()).unwrap_err();
        assert!(error.to_string().contains("none.jinja"), "{error}");
    }
}
