//! Which answers of a conversation are trained on, and in which text.

use models::tokens::{Chat, ChatTemplate};

use crate::chats::{answers, chat_of, one, with_template};

/// A template as Qwen3's: it leaves out the reasoning of answers that a message of the user follows, and writes an empty one for the last.
#[test]
fn answers_that_are_written_otherwise_later_are_trained_as_their_user_saw_them() {
    let template = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\
        {% endfor %}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.index0 > ns.last %}[{{ m.reasoning_content }}]\
        {% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let out = with_template(template);
    let template = ChatTemplate::from_folder(out.path()).unwrap().unwrap();
    let chat = |more: &str| {
        let line = format!(
            r#"{{"messages": [{{"role": "user", "content": "1"}}, {{"role": "assistant", "content": "one", "reasoning": "r"}},
            {{"role": "user", "content": "2"}}, {{"role": "assistant", "content": "two"{more}}}, {{"role": "user", "content": "3"}}]}}"#
        );
        template.render(&chat_of(&line.replace('\n', ""), out.path())).unwrap()
    };
    let rows = chat("");
    let texts: Vec<&str> = rows.iter().map(|row| &*row.text).collect();
    assert_eq!(
        texts,
        ["<user>1\n<assistant>[r]one\n", "<user>1\n<assistant>one\n<user>2\n<assistant>[]two\n"]
    );
    assert_eq!(rows.iter().map(answers).collect::<Vec<_>>(), [["[r]one\n"], ["[]two\n"]]);
    // What is not trained on needs no row.
    for more in [r#", "weight": 0"#, r#", "train": false"#] {
        assert_eq!(answers(&one(chat(more))), ["[r]one\n"]);
    }
}

#[test]
fn answers_of_no_weight_are_not_trained_on() {
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let marked = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}";
    let only_answers = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n{% endgeneration %}{% endif %}{% endfor %}";
    let of = |template: &str, first: &str, user: &str| {
        let out = with_template(template);
        let line = format!(
            r#"[{{"role": "user", "content": "1"{user}}}, {{"role": "assistant", "content": "one"{first}}},
            {{"role": "user", "content": "2"}}, {{"role": "assistant", "content": "two", "weight": 1, "train": true}}]"#
        );
        let chat = Chat::from_json(&line)?;
        let rendered = one(ChatTemplate::from_folder(out.path()).unwrap().unwrap().render(&chat)?);
        Ok::<_, models::Error>(answers(&rendered).into_iter().map(str::to_string).collect::<Vec<_>>())
    };
    for template in [plain, only_answers] {
        for first in [
            r#", "weight": 0"#, r#", "weight": 0.0"#, r#", "train": false"#,
            r#", "train": false, "weight": 0"#,
        ] {
            assert_eq!(of(template, first, r#", "weight": 0"#).unwrap(), ["two\n"], "{first}");
        }
        for first in ["", r#", "weight": 1"#, r#", "weight": 1.0, "train": null"#] {
            assert_eq!(of(template, first, "").unwrap(), ["one\n", "two\n"], "{first}");
        }
    }
    for (template, first, user, says) in [
        (plain, r#", "weight": 0.5"#, "", "message 1: `weight` is 0.5; supported are 0 and 1"),
        (plain, r#", "weight": true"#, "", "message 1: `weight` is True"),
        (plain, r#", "train": 1"#, "", "message 1: `train` is 1; supported are true and false"),
        (
            plain,
            r#", "train": true, "weight": 0"#,
            "",
            "message 1: `weight` and `train` contradict each other",
        ),
        (plain, "", r#", "train": true"#, "message 0: only what the role `assistant` says can be trained on"),
        (marked, r#", "weight": 0"#, "", "the chat template marks 4 answers, and the conversation has 2"),
    ] {
        let line = of(template, first, user).unwrap_err().to_string();
        assert!(line.contains(says) && !line.contains('\n'), "{line}");
    }
    let none = r#"[{"role": "assistant", "content": "a", "weight": 0}]"#;
    assert!(Chat::from_json(none).unwrap_err().to_string().contains("no answer is to be trained on"));
}
