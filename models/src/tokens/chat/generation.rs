//! `{% generation %}` blocks, an extension of transformers that marks the answers in a template.

/// Marks of an answer's begin and end: Unicode noncharacters, reserved for internal use, which no text contains.
pub(super) const BEGIN: char = '\u{fdd0}';
pub(super) const END: char = '\u{fdd1}';

/// Returns a template whose `generation` blocks write marks before and after their content, and whether it has any such
/// block.
pub(super) fn with_marks(template: &str) -> (String, bool) {
    let (mut out, mut rest, mut marks) = (String::new(), template, false);
    while let Some(place) = rest.find("{%") {
        let (before, tag) = rest.split_at(place);
        out.push_str(before);
        rest = tag;
        let Some(len) = tag[2..].find("%}").map(|end| end + 4) else { break };
        let (tag, after) = tag.split_at(len);
        let (left, inner, right) = parts(tag);
        let mark = match inner {
            "generation" => Some(BEGIN),
            "endgeneration" => Some(END),
            _ => None,
        };
        // Block tags on both sides of the mark, because they trim white space differently from expression tags.
        match mark {
            Some(mark) => {
                out.push_str(&format!("{{%{left} if true %}}{{{{ '{mark}' }}}}{{% endif {right}%}}"));
                marks = true;
            }
            None => out.push_str(tag),
        }
        rest = after;
        if inner == "raw" {
            // Content of a raw block has no tags.
            let end = rest.find("endraw").unwrap_or(rest.len());
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out.push_str(rest);
    (out, marks)
}

/// Returns a tag's left white space sign, its trimmed content, and its right white space sign.
fn parts(tag: &str) -> (&str, &str, &str) {
    let inner = &tag[2..tag.len() - 2];
    let left = if inner.starts_with(['-', '+']) { &inner[..1] } else { "" };
    let inner = &inner[left.len()..];
    let right = if inner.ends_with(['-', '+']) { &inner[inner.len() - 1..] } else { "" };
    (left, inner[..inner.len() - right.len()].trim(), right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_tags_are_left_alone() {
        for text in [
            "", "a {% if x %}b{% endif %} {{ '{%' }}", "{% open", "{%}",
            "{% raw %}{% generation %}{% endraw %}", "é{%-%}",
        ] {
            assert_eq!(with_marks(text), (text.to_string(), false));
        }
        let (text, marks) = with_marks("a{%- generation %}b{% endgeneration -%} c");
        assert!(marks);
        assert_eq!(
            text,
            format!(
                "a{{%- if true %}}{{{{ '{BEGIN}' }}}}{{% endif %}}b{{% if true %}}{{{{ '{END}' }}}}{{% endif -%}} c"
            )
        );
    }
}
