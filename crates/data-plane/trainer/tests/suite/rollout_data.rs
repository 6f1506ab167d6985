//! Prompts for answers with rewards: encoded as requests, with their rows.

use std::time::UNIX_EPOCH;

use serde_json::{Value, json};
use text::tokenizer::SkipSpecial;
use trainer::data::{self, DataError, DataItems, DataLimits, Encoder, RolloutItem};

use crate::support::{CHATML, TemplateTokenizer};

const HI: &str = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";

fn read(model: &TemplateTokenizer, line: &Value) -> Result<Vec<RolloutItem>, DataError> {
    let encoder = Encoder::new(&model.tokenizer, model.template.as_ref(), UNIX_EPOCH);
    let data = data::rollout_prompts(line.to_string().as_bytes(), &encoder, &DataLimits::default())?;
    let DataItems::Prompts(prompts) = data.items else { panic!("prompts") };
    Ok(prompts)
}

#[test]
fn a_prompt_is_that_of_a_request_and_an_answer_at_its_end_is_left_out() {
    let model = TemplateTokenizer::new(CHATML);
    let asked = json!({"role": "user", "content": "Hi"});
    let answer = json!({"role": "assistant", "content": "Yes"});
    for line in [
        json!({"prompt": [asked], "answer": 7}),
        json!({"messages": [asked, answer]}),
        json!({"messages": [asked], "label": true}),
        json!({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}),
        json!({"question": "Hi", "answer": "#### 7"}),
        json!({"instruction": "Hi", "output": "Yes"}),
    ] {
        let prompts = read(&model, &line).unwrap();
        let [prompt] = &prompts[..] else { panic!("one prompt") };
        assert_eq!(model.tokenizer.decode(&prompt.tokens, SkipSpecial::No), HI, "{line}");
        assert_eq!(Value::Object(prompt.row.clone()), line);
        assert!(prompt.row.contains_key(prompt.field), "{line}");
    }
    let text = read(&model, &json!({"prompt": "1 + 1 ="})).unwrap();
    assert_eq!(model.tokenizer.decode(&text[0].tokens, SkipSpecial::No), "1 + 1 =");
}

#[test]
fn a_line_without_a_prompt_names_the_fields_that_hold_one() {
    let model = TemplateTokenizer::new(CHATML);
    let fault = |line: Value| read(&model, &line).unwrap_err().to_string();
    let without = fault(json!({"text": "Hi"}));
    assert!(without.contains("the fields 'text'; GRPO needs a prompt in 'prompt', 'messages'"), "{without}");
    let number = fault(json!({"prompt": 5}));
    assert!(number.contains("'prompt' must be a string or an array of messages, not a number"), "{number}");
    let answer = fault(json!({"messages": [{"role": "assistant", "content": "Yes"}]}));
    assert!(answer.contains("no prompt"), "{answer}");
    let image = fault(json!({"prompt": "Hi", "image": "a.png"}));
    assert!(image.contains("'image'"), "{image}");
}
