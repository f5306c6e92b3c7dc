// Show the form for the model's input.
$(facts.input).hidden = false;
({draw: startDrawing, image: startImage, numbers: startNumbers})[facts.input]();
