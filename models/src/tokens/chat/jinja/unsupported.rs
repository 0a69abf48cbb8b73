//! Finds what minijinja would compute otherwise than Jinja2, and what cannot be found while a template runs.

/// Variables of Jinja2 that do not exist here, and are not undefined there.
const VARIABLES: [&str; 3] = ["varargs", "kwargs", "self"];

/// Returns what is not supported in a template, with its line from 1.
pub(super) fn find(template: &str) -> Option<(usize, String)> {
    let mut rest = template;
    while let Some(place) = rest.find("{%").into_iter().chain(rest.find("{{")).chain(rest.find("{#")).min() {
        let (kind, tag) = rest[place..].split_at(2);
        let (close, skips) = match kind {
            "{%" => ("%}", false),
            "{{" => ("}}", false),
            _ => ("#}", true),
        };
        let end = tag.find(close).unwrap_or(tag.len());
        let inner = tag[..end].trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        let problem = if skips { None } else { in_tag(inner) };
        if let Some(problem) = problem {
            let line = template[..template.len() - tag.len()].matches('\n').count() + 1;
            return Some((line, problem));
        }
        rest = &tag[end..];
        if kind == "{%" && inner == "raw" {
            rest = rest.find("endraw").map_or("", |end| &rest[end..]);
        }
    }
    None
}

fn in_tag(tag: &str) -> Option<String> {
    let words = words(tag);
    if let Some(word) = words.iter().find(|word| VARIABLES.contains(&word.text) && !word.is_name) {
        return Some(format!("`{}` is not supported", word.text));
    }
    if words.first().is_none_or(|word| word.text != "macro") {
        return None;
    }
    // A default that is another parameter's value.
    let parameters: Vec<&str> =
        words.iter().skip(2).filter(|word| !word.is_value).map(|word| word.text).collect();
    let default = words.iter().skip(2).find(|word| word.is_value && parameters.contains(&word.text))?;
    Some(format!("a macro's default that is its parameter `{}` is not supported", default.text))
}

/// A word of a tag that is neither in a string nor an attribute.
struct Word<'a> {
    text: &'a str,
    /// Whether it names an argument or variable that gets a value.
    is_name: bool,
    /// Whether it is part of a value.
    is_value: bool,
}

fn words(tag: &str) -> Vec<Word<'_>> {
    let (mut words, mut place, mut is_value, mut depth, mut before) = (Vec::new(), 0, false, 0, ' ');
    while let Some(character) = tag[place..].chars().next() {
        let rest = &tag[place..];
        let len = match character {
            '"' | '\'' => string(rest),
            'a'..='z' | 'A'..='Z' | '_' => {
                rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len())
            }
            _ => character.len_utf8(),
        };
        let after = rest[len..].trim_start();
        let is_given = after.starts_with('=') && !after.starts_with("==");
        match character {
            'a'..='z' | 'A'..='Z' | '_' if before != '.' => {
                words.push(Word { text: &rest[..len], is_name: is_given, is_value });
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '=' if depth == 1 => is_value = true,
            ',' if depth == 1 => is_value = false,
            _ => {}
        }
        before = if character.is_whitespace() { before } else { character };
        place += len;
    }
    words
}

/// Returns the length of a string that the text begins with.
fn string(text: &str) -> usize {
    let quote = text.chars().next().unwrap_or_default();
    let mut is_escaped = false;
    for (place, character) in text.char_indices().skip(1) {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if character == quote => return place + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::find;

    #[test]
    fn what_is_not_supported_is_told_with_its_line() {
        for (template, problem) in [
            ("{% macro f(a, b=2, c='a') %}{{ a }}{% endmacro %}{{ f(b=1) }}", None),
            ("a\n{% macro f(a, b=a) %}{% endmacro %}", Some((2, "parameter `a`"))),
            ("{% macro f(a, b=[1, a]) %}{% endmacro %}", Some((1, "parameter `a`"))),
            ("{% macro f() %}\n\n{{- varargs }}{% endmacro %}", Some((3, "`varargs`"))),
            ("{{ m.kwargs }}{{ m['self'] }}{{ f(kwargs=1) }}{# self #}{% raw %}{{ self }}{% endraw %}", None),
            ("{{ self }", Some((1, "`self`"))),
            ("{% if x", None),
        ] {
            let found = find(template);
            let expected = problem.map(|(line, _)| line);
            assert_eq!(found.as_ref().map(|(line, _)| *line), expected, "{template}: {found:?}");
            assert!(problem.is_none_or(|(_, part)| found.is_some_and(|(_, found)| found.contains(part))));
        }
    }
}
