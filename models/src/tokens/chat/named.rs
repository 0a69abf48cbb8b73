//! Chat templates that a user names, for folders without one.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use training::internal::write_output;

use super::{
    ChatTemplate, FILE, MORE_TEMPLATES, NAME_WITH_TOOLS, Texts, read, special_tokens, texts_of_folder,
};
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
    /// The template of a folder, such as that of adapters, also for conversations with tools if it has one.
    Folder(PathBuf),
}

impl FromStr for NamedTemplate {
    type Err = Infallible;

    fn from_str(text: &str) -> std::result::Result<Self, Infallible> {
        Ok(if text == "chatml" { Self::ChatMl } else { Self::File(text.into()) })
    }
}

impl NamedTemplate {
    /// Returns what is used in place of the template of a model's folder: the one that a user names, else that of the folder of
    /// adapters, if it has one.
    ///
    /// # Errors
    /// Files of the adapters' folder that cannot be read.
    pub fn chosen(named: Option<&Self>, adapters: Option<&Path>) -> Result<Option<Self>> {
        match (named, adapters) {
            (Some(named), _) => Ok(Some(named.clone())),
            (None, Some(folder)) => Ok(texts_of_folder(folder)?.map(|_| Self::Folder(folder.into()))),
            (None, None) => Ok(None),
        }
    }

    fn texts(&self) -> Result<Texts> {
        let one = |text: String, path: PathBuf| Texts { text, with_tools: None, path };
        match self {
            Self::ChatMl => Ok(one(CHATML.into(), "chatml".into())),
            Self::File(path) => Ok(one(read(path)?, path.clone())),
            Self::Folder(folder) => match texts_of_folder(folder)? {
                Some(texts) => Ok(texts),
                // It has had one: the error says what is missing.
                None => read(&folder.join(FILE)).map(|text| one(text, folder.join(FILE))),
            },
        }
    }

    /// Returns the template for conversations without tools.
    pub(crate) fn text(&self) -> Result<String> {
        Ok(self.texts()?.text)
    }

    fn load(&self, folder: Option<&Path>) -> Result<ChatTemplate> {
        let special = folder.map_or(Ok(Default::default()), special_tokens)?;
        ChatTemplate::new(self.texts()?, special)
    }

    /// Returns the files that have it in a model's folder, with their contents.
    pub(crate) fn files(&self) -> Result<Vec<(String, String)>> {
        let Texts { text, with_tools, .. } = self.texts()?;
        let with_tools = with_tools.map(|text| (format!("{MORE_TEMPLATES}/{NAME_WITH_TOOLS}.jinja"), text));
        Ok(std::iter::once((FILE.to_string(), text)).chain(with_tools).collect())
    }

    /// Saves the template with a model, where programs look for it.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        for (name, text) in self.files()? {
            let path = folder.join(name);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent).map_err(Error::io("make", parent))?;
            }
            write_output(&path, text.as_bytes()).map_err(Error::io("write", &path))?;
        }
        Ok(())
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
