// The Vercel AI SDK asks about the weather, whole and streamed; prints the final texts as a JSON list.
//   node agent.mjs BASE_URL MODEL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "lockstep", baseURL, apiKey: "none" })(name);
const asked = {
  model,
  system: "Be brief.",
  prompt: "How warm is it in Oslo and in Rome?",
  tools: {
    get_weather: tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => ({ Oslo: "4 C and rain", Rome: "20 C and sun" })[city],
    }),
  },
  stopWhen: stepCountIs(5),
  maxRetries: 0,
};
const whole = await generateText(asked);
const streamed = streamText({ ...asked, onError: ({ error }) => { throw error; } });
await streamed.consumeStream();
console.log(JSON.stringify([whole.text, await streamed.text]));
