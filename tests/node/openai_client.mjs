// The openai package for Node against an endpoint; prints what it got as one JSON object.
//   node openai_client.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Rome?" }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string", enum: ["Rome", "Oslo"] }, celsius: { type: "boolean" } },
        required: ["city", "celsius"],
        additionalProperties: false,
      },
    },
  },
];
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 12 }, age: { type: "integer", minimum: 1, maximum: 99 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const greedy = { model, messages, temperature: 0, max_tokens: 24 };
const got = {};

got.models = (await client.models.list()).data.map((it) => it.id);
got.retrieved = (await client.models.retrieve(model)).id;

got.chat = await client.chat.completions.create(greedy);
const stream = await client.chat.completions.create({ ...greedy, stream: true, stream_options: { include_usage: true } });
got.streamed = { text: "", finish_reason: null, usage: null };
for await (const chunk of stream) {
  got.streamed.text += chunk.choices[0]?.delta?.content ?? "";
  got.streamed.finish_reason = chunk.choices[0]?.finish_reason ?? got.streamed.finish_reason;
  got.streamed.usage = chunk.usage ?? got.streamed.usage;
}

const completion = { model, prompt: "The capital of France is", temperature: 0, max_tokens: 6 };
got.completion = (await client.completions.create(completion)).choices[0].text;
got.completionStreamed = "";
for await (const chunk of await client.completions.create({ ...completion, stream: true })) {
  got.completionStreamed += chunk.choices[0]?.text ?? "";
}

const calling = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 120, temperature: 1, seed: 3 };
got.called = (await client.chat.completions.create(calling)).choices[0];
const runner = client.chat.completions.stream(calling);
got.calledStreamed = (await runner.finalChatCompletion()).choices[0];

const parsed = await client.chat.completions.parse({
  model,
  messages: [{ role: "user", content: "Invent a person." }],
  response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
  temperature: 1,
  max_tokens: 120,
});
got.person = parsed.choices[0].message.parsed;

const response = { model, input: "Say hello.", max_output_tokens: 16, temperature: 0 };
const created = await client.responses.create(response);
got.response = { id: created.id, text: created.output_text, status: created.status };
got.responseRetrieved = (await client.responses.retrieve(created.id)).output_text;
got.responseStreamed = "";
got.responseEvents = [];
for await (const event of await client.responses.create({ ...response, stream: true })) {
  got.responseEvents.push(event.type);
  if (event.type === "response.output_text.delta") got.responseStreamed += event.delta;
}

try {
  await client.chat.completions.create({ ...greedy, model: "no-such-model" });
} catch (error) {
  got.error = { kind: error.constructor.name, status: error.status, code: error.code };
}
const aborted = new AbortController();
try {
  const long = await client.chat.completions.create({ ...greedy, max_tokens: 2000, stream: true }, { signal: aborted.signal });
  for await (const _ of long) aborted.abort();
  got.aborted = true;
} catch (error) {
  got.aborted = error.constructor.name === "APIUserAbortError";
}
console.log(JSON.stringify(got));
