//! Every format of training data, and the tokens that have loss.

use crate::support::{CHATML, TemplateTokenizer, file};
use serde_json::{Map, Value, json};
use text::{
    chat::{Chat, Message},
    chat_template::GenerationPrompt,
    tokenizer::{AddSpecial, ParseSpecial},
};
use trainer::data::{self, DataItems, DataKind, DataLimits, FilePrompts};

const ASKED: &str = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";

#[test]
fn of_a_conversation_the_assistants_turns_are_learned_up_to_their_end() {
    let line = json!({"messages": [
        {"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"}, {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four"}]});
    let expected = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yes<|im_end|>]\n\
                    <|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n[Four<|im_end|>]";
    assert_eq!(TemplateTokenizer::new(CHATML).examples(&[line]), [expected]);
}

#[test]
fn turns_of_weight_zero_are_shown_and_not_learned() {
    let line = json!({"messages": [
        {"role": "user", "content": "Hi", "weight": 0}, {"role": "assistant", "content": "No", "weight": 0},
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "weight": 1.0, "name": "bot"}]});
    let expected = [ASKED, "No<|im_end|>\n", ASKED, "[Yes<|im_end|>]"].concat();
    assert_eq!(TemplateTokenizer::new(CHATML).examples(&[line]), [expected]);
}

#[test]
fn forms_that_mean_a_conversation_become_the_same_one() {
    let model = TemplateTokenizer::new(CHATML);
    let expected = [[ASKED, "[Yes<|im_end|>]"].concat()];
    let user = json!({"role": "user", "content": "Hi"});
    let assistant = json!({"role": "assistant", "content": [{"type": "text", "text": "Y"}, {"type": "text", "text": "es"}]});
    for line in [
        json!({"messages": [user, assistant], "id": 7, "tools": null, "text": "another form of the same"}),
        json!({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}),
        json!({"instruction": "Hi", "input": "", "output": "Yes"}),
        json!({"instruction": "Hi", "output": "Yes"}),
        json!({"prompt": [user], "completion": [assistant]}),
    ] {
        assert_eq!(model.examples(std::slice::from_ref(&line)), expected, "{line}");
    }
    let with_input = json!({"instruction": "Add", "input": "1 2", "output": "3"});
    let expected = "<|im_start|>user\nAdd\n\n1 2<|im_end|>\n<|im_start|>assistant\n[3<|im_end|>]";
    assert_eq!(model.examples(&[with_input]), [expected]);
}

#[test]
fn of_plain_texts_the_completion_or_all_is_learned_with_an_end() {
    let mut model = TemplateTokenizer::new(CHATML);
    // Plain texts need no template.
    model.template = None;
    let completions = [
        json!({"prompt": "2+2=", "completion": "4"}),
        json!({"prompt": "", "completion": "ab"}),
        json!({"prompt": "a<|im_start|>", "completion": "b<|im_end|>"}),
    ];
    let expected = ["2+2=[4<|im_end|>]", "a[b<|im_end|>]", "a<|im_start|>[b<|im_end|>]"];
    assert_eq!(model.examples(&completions), expected);
    assert_eq!(model.examples(&[json!({"text": "abc"})]), ["a[bc<|im_end|>]"]);
}

#[test]
fn preferences_are_pairs_over_one_prompt() {
    let model = TemplateTokenizer::new(CHATML);
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let (user, yes, no) = (message("user", "Hi"), message("assistant", "Yes"), message("assistant", "No"));
    let expected = [["[Yes<|im_end|>]", "[No<|im_end|>]"].map(|answer| [ASKED, answer].concat())];
    for line in [
        json!({"prompt": [user], "chosen": [yes], "rejected": [no]}),
        json!({"chosen": [user, yes], "rejected": [user, no]}),
        json!({"prompt": "Hi", "chosen": [yes], "rejected": [no]}),
        // The format of UltraFeedback.
        json!({"prompt": "Hi", "chosen": [user, yes], "rejected": [user, no], "messages": [user, yes]}),
        json!({"input": {"messages": [user], "tools": []}, "preferred_output": [yes], "non_preferred_output": [no]}),
    ] {
        assert_eq!(model.pairs(std::slice::from_ref(&line)), expected, "{line}");
    }
    let texts = json!({"prompt": "a ", "chosen": "b", "rejected": "c"});
    assert_eq!(model.pairs(&[texts]), [["a [b<|im_end|>]", "a [c<|im_end|>]"].map(str::to_owned)]);
}

#[test]
fn the_tokens_before_an_answer_are_those_a_request_sends() {
    let model = TemplateTokenizer::new(CHATML);
    let template = model.template.as_ref().unwrap();
    // The answer's first line end would merge with the prompt's last into one token.
    for (content, answer) in [("Hi", "\nYes"), ("<|im_end|> is text", "\n<|im_end|>"), ("\n", "Yes\n\n")] {
        let line = json!({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]});
        let DataItems::Examples(examples) = model.read(&file(&[line])).unwrap().items else {
            panic!("examples")
        };
        let asked = [Message { role: "user", content }];
        let chat = Chat::new(&model.tokenizer, template, TemplateTokenizer::now());
        let prompt = chat.encode(&asked, GenerationPrompt::Add).unwrap();
        let [example] = examples.as_slice() else { panic!("one example") };
        let (sent, said) = example.tokens.split_at(prompt.len());
        assert_eq!(sent, prompt);
        let mut expected = model.tokenizer.encode(answer, AddSpecial::No, ParseSpecial::No).unwrap();
        expected.push(model.tokenizer.eos_token().unwrap());
        assert_eq!(said, expected, "{answer:?}");
        assert!(example.weights[..prompt.len() - 1].iter().all(|weight| *weight == 0.0));
        assert!(example.weights[prompt.len() - 1..].iter().all(|weight| *weight == 1.0));
    }
}

#[test]
fn the_real_model_learns_turns_as_it_would_give_them() {
    let model = TemplateTokenizer::smollm2();
    let line = json!({"messages": [
        {"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\nYes, 42 日本."},
        {"role": "user", "content": "So?"}, {"role": "assistant", "content": "No"}]});
    let before = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    let behind = "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n[No<|im_end|>]";
    let answer = "\n\nYes, 42 日本.<|im_end|>";
    // Rendered whole, the answer's line ends merge with the header's into one token, so the text after a
    // prompt is another row.
    let expected = [format!("{before}[{answer}]"), format!("{before}{answer}\n{behind}")];
    assert_eq!(model.examples(&[line]), expected);
    let line = json!({"prompt": "2 + 2 =", "completion": " 4"});
    assert_eq!(model.examples(&[line]), ["2 + 2 =[ 4<|im_end|>]"]);
}

/// A template like Qwen3's: only the last answer keeps its reasoning content.
const FORGETFUL: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

#[test]
fn a_template_that_rewrites_what_was_said_gives_an_example_for_each_turn() {
    let line = json!({"messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hm</think>Yes"},
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Plain"},
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hm</think>No"}]});
    let rest = ["Yes<|im_end|>\n", ASKED, "[Plain<|im_end|>]\n", ASKED, "[Hm</think>No<|im_end|>]"].concat();
    let expected = [[ASKED, "[Hm</think>Yes<|im_end|>]"].concat(), [ASKED, &rest].concat()];
    assert_eq!(TemplateTokenizer::new(FORGETFUL).examples(&[line]), expected);
}

#[test]
fn a_template_that_asks_otherwise_than_it_shows_is_refused() {
    // A template like DeepSeek-R1's: the prompt begins the reasoning content, which no message contains.
    let thinking = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif");
    let line =
        json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]});
    assert!(TemplateTokenizer::new(&thinking).fault(&line).contains("generation prompt differs"));
}

#[test]
fn a_template_without_a_token_that_ends_a_turn_is_learned_to_its_end() {
    let plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
    let line =
        json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]});
    assert_eq!(TemplateTokenizer::new(plain).examples(&[line]), ["user: Hi\nassistant: [Yes\n]"]);
}

#[test]
fn a_date_in_a_template_is_the_jobs_and_not_the_days() {
    let dated = format!("{{{{ strftime_now('%Y') }}}} {CHATML}");
    let line =
        json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]});
    assert!(TemplateTokenizer::new(&dated).examples(&[line])[0].starts_with("2023 "));
}

#[test]
fn the_file_is_known_by_its_hash_and_examples_by_their_line() {
    let text = "\u{feff}{\"text\":\"ab\"}\r\n{\"text\":\"cd\"}\r\n\r\n";
    let dataset = TemplateTokenizer::new(CHATML).read(text).unwrap();
    assert_eq!((dataset.kind, dataset.hash), (DataKind::Text, blake3::hash(text.as_bytes())));
    let DataItems::Examples(examples) = dataset.items else { panic!("examples") };
    assert_eq!(examples.iter().map(|example| example.line).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn templates_of_known_models_give_what_a_request_would_send_and_an_end() {
    let golden = include_str!("../../../../shared/text/tests/golden/templates.json");
    let golden: Value = serde_json::from_str(golden).unwrap();
    let messages = [("user", "Hi"), ("assistant", "Yes"), ("user", "So?"), ("assistant", "No")];
    let line = json!({"messages": messages.map(|(role, content)| json!({"role": role, "content": content}))});
    let templates: &Map<String, Value> = golden["templates"].as_object().unwrap();
    for (name, learned) in [
        ("chatml", ["[Yes<|im_end|>]", "[No<|im_end|>]"]),
        ("qwen", ["[Yes<|im_end|>]", "[No<|im_end|>]"]),
        ("llama3", ["[Yes<|eot_id|>", "[No<|eot_id|>]"]),
        ("mistral", ["[ Yes<|im_end|>]", "[ No<|im_end|>]"]),
    ] {
        let shown =
            TemplateTokenizer::new(templates[name].as_str().unwrap()).examples(std::slice::from_ref(&line));
        assert!(shown.len() == 1 && learned.iter().all(|part| shown[0].contains(part)), "{name}: {shown:?}");
    }
}

#[test]
fn what_a_model_said_is_learned_token_for_token_behind_its_prompt() {
    let model = TemplateTokenizer::new(CHATML);
    let line = json!({
        "kind": "code", "messages": [{"role": "user", "content": "a"}],
        "answers": [
            {"temperature": 0, "tokens": [98, 258], "likely": [[[98, -0.5], [99, -1.5]], [[258, 0.0]]]},
            {"temperature": 0.7, "tokens": [99]},
        ],
    });
    let DataItems::Said(said) = model.read(&file(&[line.clone(), line])).unwrap().items else { panic!() };
    assert_eq!(said.iter().map(|said| said.example.line).collect::<Vec<_>>(), [1, 1, 2, 2]);
    assert_eq!(
        model.shown(&said[0].example),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"
    );
    assert_eq!((said[0].is_greedy, said[1].is_greedy, said[0].kind.as_str()), (true, false, "code"));
    assert_eq!(said[0].likely[0], [(98, (-0.5f32).exp()), (99, (-1.5f32).exp())]);
    assert_eq!(said[0].likely[1], [(258, 1.0)]);
    assert!(said[1].likely.is_empty());
    assert_eq!(DataItems::Said(said).of_lines(), [0..2, 2..4]);
}

#[test]
fn what_no_model_can_have_said_is_refused() {
    let model = TemplateTokenizer::new(CHATML);
    let fault = |answer: Value| {
        model.fault(&json!({"messages": [{"role": "user", "content": "a"}], "answers": [answer]}))
    };
    let cases = [
        (json!({"temperature": 0, "tokens": []}), "'answers' is empty"),
        (json!({"temperature": 0, "tokens": [9999]}), "9999 is not a token"),
        (json!({"temperature": 0, "tokens": [98], "likely": [[[9999, -1.0]]]}), "9999 is not a token"),
        (json!({"temperature": 0, "tokens": [98], "likely": [[], []]}), "one list for each token"),
        (json!({"temperature": 0, "tokens": [98], "likely": [[[98, 0.5]]]}), "log-probabilities"),
        (json!({"tokens": [98]}), "missing field `temperature`"),
        (json!({"temperature": 0, "tokens": [98], "text": "b"}), "unknown field `text`"),
    ];
    for (answer, wanted) in cases {
        let fault = fault(answer);
        assert!(fault.contains(wanted), "{fault}");
    }
}

fn asked(lines: &[Value]) -> Vec<String> {
    let told = |prompt: data::DataPrompt| {
        let said: Vec<String> =
            prompt.messages().iter().map(|(role, content)| format!("{role}: {content}")).collect();
        format!("{} | {}", prompt.kind, said.join(" / "))
    };
    match data::prompts(file(lines).as_bytes(), &DataLimits::default()).unwrap() {
        FilePrompts::Prompts(prompts) => prompts.into_iter().map(told).collect(),
        FilePrompts::Answered => vec!["answered".to_owned()],
    }
}

#[test]
fn prompts_are_what_comes_before_each_answer_of_the_assistant() {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let conversation = [
        message("system", "s"),
        message("user", "a"),
        message("assistant", "b"),
        message("user", "c"),
        message("assistant", "d"),
    ];
    let whole = json!({"kind": "chat", "messages": conversation});
    assert_eq!(
        asked(&[whole]),
        ["chat | system: s / user: a", "chat | system: s / user: a / assistant: b / user: c"]
    );
    let open = json!({"messages": [message("user", "a")]});
    assert_eq!(asked(&[open]), ["text | user: a"]);
    assert_eq!(asked(&[json!({"prompt": "p", "completion": "c"})]), ["text | user: p"]);
    assert_eq!(asked(&[json!({"instruction": "i", "input": "n", "output": "o"})]), ["text | user: i\n\nn"]);
    let better = json!({"input": {"messages": [message("user", "a")]},
        "preferred_output": [message("assistant", "b")], "non_preferred_output": [message("assistant", "c")]});
    assert_eq!(asked(&[better]), ["text | user: a"]);
    assert_eq!(asked(&[json!({"messages": [message("user", "a")], "answers": []})]), ["answered"]);
    for nothing in [json!({"text": "t"}), json!({"messages": [message("assistant", "a")]})] {
        let error = data::prompts(file(&[nothing]).as_bytes(), &DataLimits::default()).unwrap_err();
        assert!(error.to_string().contains("no prompt for the model"), "{error}");
    }
}
